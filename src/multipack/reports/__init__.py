"""What people look at: the console, tables and pictures of plans, reports of runs as text and pages."""
