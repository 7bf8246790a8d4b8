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

    from deepinfer.scheduler.worker_process import start_worker, takes_images
    from deepinfer.wire.children import exit_with_parent, read_config, remove_directory
    from deepinfer.wire.config import SchedulerConfig

    config = read_config(SchedulerConfig)
    directory = Path(config.directory)
    exit_with_parent(on_parent_gone=lambda: remove_directory(directory))
    try:
        arena, trouble = None, ""
        if takes_images(config.args):
            from deepinfer.wire.arena import Arena

            try:
                arena = Arena.create(config.args.image_arena_bytes)
            except OSError as error:
                trouble = f"image_arena_bytes: {error.strerror}"
        # The worker takes longest to start, so it does not wait for this process's imports.
        arena_fd = arena.fileno if arena is not None else None
        worker = start_worker(config.args, config.directory, 1, arena_fd)

        from deepinfer.scheduler.process import main

        main(config, worker, arena, trouble)
    finally:
        remove_directory(directory)
