"""``python -m deepinfer.scheduler``: the scheduler process, started by a frontend."""

import signal

if __name__ == "__main__":
    # First of all, before the imports take their time: what comes to all processes of a terminal
    # or a service is the parent's to decide.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)

    from deepinfer.wire.children import wake_when_orphaned

    wake_when_orphaned()

    from pathlib import Path

    from deepinfer.scheduler.worker_process import start_worker
    from deepinfer.wire.children import exit_with_parent, read_config, remove_directory
    from deepinfer.wire.config import SchedulerConfig

    config = read_config(SchedulerConfig)
    directory = Path(config.directory)
    exit_with_parent(on_parent_gone=lambda: remove_directory(directory))
    try:
        # The worker takes longest to start, so it does not wait for this process's imports.
        worker = start_worker(config.args, config.directory, 1)

        from deepinfer.scheduler.process import main

        main(config, worker)
    finally:
        remove_directory(directory)
