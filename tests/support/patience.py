"""How long tests wait for what must happen: for what hangs, not for what is slow."""

PATIENCE_S = 120.0
"""It costs nothing when all is well; machines that run tests may be ten times slower than ours."""
