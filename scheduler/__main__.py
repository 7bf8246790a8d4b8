"""``python -m deepinfer.scheduler``: the scheduler process, started by a frontend."""

from deepinfer.scheduler.process import main

if __name__ == "__main__":
    main()
