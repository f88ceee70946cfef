"""`python -m deepinfer` is the `deepinfer` command."""

from deepinfer.cli import main

main()
