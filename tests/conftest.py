"""Settings of the whole test suite."""

import jax
from hypothesis import settings

# Tests spend most of their time compiling. Less optimised programs compute the same values.
jax.config.update("jax_disable_most_optimizations", True)

settings.register_profile("jdlite", deadline=None, print_blob=True)
settings.load_profile("jdlite")
