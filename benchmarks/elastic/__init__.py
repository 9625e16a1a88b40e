"""Jobs whose ranks fail, join, leave or become slower."""
