"""CPU kernels, written in Python and compiled by numba.

``settings`` is imported first: numba reads its configuration when it is imported.
"""

from deepinfer.gpu_worker.kernels import settings as settings
