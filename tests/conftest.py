"""Settings of the whole test suite."""

import os

import jax
from hypothesis import settings

# The Mosaic GPU interpreter of JAX 0.12 runs the warpgroups of a kernel on XLA's own threads, as many as NPROC says or
# the machine has cores. Where those are fewer than the warpgroups and what waits for them, a kernel waits for ever.
if jax.__version_info__ >= (0, 12):
    os.environ.setdefault("NPROC", "8")

# Tests spend most of their time compiling. Less optimised programs compute the same values.
jax.config.update("jax_disable_most_optimizations", True)

settings.register_profile("jdlite", deadline=None, print_blob=True)
settings.load_profile("jdlite")
