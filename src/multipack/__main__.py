"""`python -m multipack` is the same program as `multipack`."""

from multipack.cli import main

if __name__ == "__main__":
    main()
