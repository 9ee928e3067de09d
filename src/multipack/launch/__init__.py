"""Before any process group exists: how processes are started, and whether a machine is fit for them."""
