"""``python -m deepinfer.scheduler``: the scheduler process, started by a frontend."""

import signal

if __name__ == "__main__":
    # First of all, before the imports take their time: Ctrl-C is the parent's to decide.
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    from deepinfer.wire.children import wake_when_orphaned

    wake_when_orphaned()

    from deepinfer.scheduler.process import main

    main()
