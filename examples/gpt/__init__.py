"""A decoder-only GPT trained over pipeline stages that live on different device meshes."""
