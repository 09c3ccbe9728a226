"""`python -m hpc_rollart` is the `hpc-rollart` command."""

from hpc_rollart.cli import main

if __name__ == "__main__":
    main()
