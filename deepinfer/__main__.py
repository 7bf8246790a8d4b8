"""``python -m deepinfer`` is the same program as ``deepinfer``."""

from deepinfer.frontend.cli import main

if __name__ == "__main__":
    main()
