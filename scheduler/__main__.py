"""``python -m deepinfer.scheduler``: the scheduler process, started by a frontend."""

import signal

if __name__ == "__main__":
    # First of all, before the imports take their time: what comes to all processes of a terminal
    # or a service is the parent's to decide.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)

    from deepinfer.wire.children import wake_when_orphaned

    wake_when_orphaned()

    from deepinfer.scheduler.process import main

    main()
