"""What people look at: the console, and pictures made from a plan or a run directory."""
