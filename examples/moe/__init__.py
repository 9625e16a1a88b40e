"""A GPT with a mixture of experts in each layer, its experts shared over the ranks of a stage."""
