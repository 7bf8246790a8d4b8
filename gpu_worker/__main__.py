"""``python -m deepinfer.gpu_worker``: the device worker process, started by the scheduler."""

from deepinfer.gpu_worker.process import main

if __name__ == "__main__":
    main()
