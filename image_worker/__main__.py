"""``python -m deepinfer.image_worker``: an image worker process, started by the scheduler."""

import os
import signal

if __name__ == "__main__":
    # First of all, before the imports take their time: what comes to all processes of a terminal
    # or a service is the parent's to decide.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # Before numpy is imported: the encoder's own threads call the BLAS, each for its piece.
    for variable in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[variable] = "1"

    from deepinfer.wire.children import read_config, wake_when_orphaned
    from deepinfer.wire.config import WorkerConfig

    wake_when_orphaned()

    from deepinfer.image_worker.process import main

    main(read_config(WorkerConfig))
