"""Text output: the console, tables about plans and stores, and pictures of plans."""
