"""Build of the package: the one-line .pth that starts the lm_eval plugin, in wheels and editable
installs, and the kernels for the CPU if there is a C compiler.

The kernels contain no Python, so one library serves every Python 3, and the wheel's tag says so.
"""

import os
from multiprocessing.pool import ThreadPool
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py
from setuptools.command.editable_wheel import editable_wheel

# Python reads .pth files in sorted order: this name follows setuptools' `__editable__…`, which
# makes the package importable. The line is silent, since a broken package must not break Python.
PTH = "griffin_eval_plugin.pth"
LINE = (
    r"import sys; exec('try:\n    from griffin_eval._plugin import start; start()\n"
    r"except (Exception, SystemExit):\n    pass')"
) + "\n"


class BuildPy(build_py):
    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            Path(self.build_lib, PTH).write_text(LINE)

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        outputs = super().get_outputs(include_bytecode)
        return outputs if self.editable_mode else [*outputs, str(Path(self.build_lib, PTH))]


class EditableWheel(editable_wheel):
    def _run_build_commands(self, dist_name, unpacked_wheel, build_lib, tmp_dir):
        Path(unpacked_wheel, PTH).write_text(LINE)
        return super()._run_build_commands(dist_name, unpacked_wheel, build_lib, tmp_dir)


class BuildExt(build_ext):
    def build_extensions(self) -> None:
        compile_all = self.compiler.compile

        def side_by_side(sources: list[str], **options) -> list[str]:
            with ThreadPool(os.cpu_count()) as pool:
                compiled = pool.map(lambda path: compile_all([path], **options), sources, 1)
            return [path for each in compiled for path in each]

        self.compiler.compile = side_by_side
        super().build_extensions()

    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split("."))) + ".so"  # no tag of a Python version


class BdistWheel(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


# A library without Python, loaded by griffin_eval/kernels/cpu/compiled.py.
KERNELS = Extension(
    "griffin_eval.kernels._cpu",
    [  # slowest to compile first
        "kernels/linear/cpu.c",
        "kernels/attention/cpu.c",
        "kernels/rglru/cpu.c",
        "kernels/cpu/runtime.c",
        "kernels/cpu/xla.c",
    ],
    depends=["kernels/cpu/floats.h", "kernels/cpu/runtime.h"],
    extra_compile_args=["-O3", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast"]
    # No debug information, which would be two thirds of the library's size.
    + ["-pthread", "-Wno-psabi", "-g0"],
    extra_link_args=["-pthread"],
    optional=True,  # without a compiler the plain implementations run
)

setup(
    cmdclass={
        "bdist_wheel": BdistWheel,
        "build_ext": BuildExt,
        "build_py": BuildPy,
        "editable_wheel": EditableWheel,
    },
    ext_modules=[KERNELS],
)
