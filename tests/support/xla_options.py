"""What makes XLA compile for the CPU quickly rather than well, in the release that is installed."""

from importlib.metadata import version

from packaging.version import Version

# An option that jaxlib 0.11 no longer knows, and refuses.
_FUSION = Version(version("jaxlib")) < Version("0.11")

QUICK_COMPILE = {"xla_backend_optimization_level": 0} | (
    {"xla_cpu_use_fusion_emitters": False} if _FUSION else {}
)
# As for users, whatever XLA_FLAGS say.
FULL_COMPILE = {"xla_backend_optimization_level": 3} | (
    {"xla_cpu_use_fusion_emitters": True} if _FUSION else {}
)
QUICK_FLAGS = " ".join(f"--{name}={value}".lower() for name, value in QUICK_COMPILE.items())
