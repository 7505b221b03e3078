"""XLA options of the installed release for quick or full compilation on the CPU."""

from importlib.metadata import version

from packaging.version import Version

# jaxlib 0.11 refuses the option for fusion emitters.
_FUSION = Version(version("jaxlib")) < Version("0.11")

QUICK_COMPILE = {"xla_backend_optimization_level": 0} | (
    {"xla_cpu_use_fusion_emitters": False} if _FUSION else {}
)
# The defaults that users get, independent of XLA_FLAGS.
FULL_COMPILE = {"xla_backend_optimization_level": 3} | (
    {"xla_cpu_use_fusion_emitters": True} if _FUSION else {}
)
QUICK_FLAGS = " ".join(f"--{name}={value}".lower() for name, value in QUICK_COMPILE.items())
