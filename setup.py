# SPDX-License-Identifier: Apache-2.0
"""The compiled modules: every .pyx under te/ and kvstore/. Where they are built in place, as for an
editable install, what `te bench` has compiled, too. All else of the package is in pyproject.toml.
"""

import os
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.modified import newer_group

TOPS = ("te", "kvstore")
HEADERS = [str(one) for top in TOPS for one in sorted(Path(top).rglob("*.h"))]
COMMON = ["setup.py", *HEADERS]
PASSES = {"te.verbs._core": "-O2"}  # not a loop in it
#: Functions and lines alone of what Python's flags write down: 12 % less to do, a quarter the size.
DEBUGGING = "-g1"


class BuildOnAllCores(build_ext):
    """Cython in processes, as it holds the interpreter's lock; then the compiler in threads."""

    def finalize_options(self) -> None:
        if self.inplace or self.editable_mode:
            self.distribution.ext_modules += of_bench()
        super().finalize_options()
        self.parallel = self.parallel or len(os.sched_getaffinity(0))

    def build_extensions(self) -> None:
        from Cython.Build import cythonize  # of the build's environment

        made = cythonize(self.extensions, nthreads=self.parallel, force=self.force, quiet=True)
        sources = {one.name: one.sources for one in made}
        for one in self.extensions:
            one.sources = sources[one.name]
        if self.editable_mode:
            # An editable install builds in an empty folder, and copies from there what was built.
            self.extensions = [one for one in self.extensions if self.is_out_of_date(one)]
        super().build_extensions()

    def copy_file(self, infile: str, outfile: str, **how: object) -> tuple[str, bool]:
        """Whole or not at all: a copy that a kill cut short would look up to date."""
        partial = Path(f"{outfile}.partial")
        partial.unlink(missing_ok=True)
        super().copy_file(infile, str(partial), **how)
        partial.replace(outfile)
        return outfile, True

    def is_out_of_date(self, one: Extension) -> bool:
        """Whether the module beside its sources is older than one of them, or is not there."""
        return newer_group([*one.sources, *one.depends], self.get_ext_filename(one.name))


def extension(source: Path) -> Extension:
    name = ".".join(source.with_suffix("").parts)
    included = [str(one) for one in sorted(source.parent.glob("*.px[id]"))]
    return Extension(
        name,
        [str(source)],
        depends=[*COMMON, *included],
        include_dirs=["te"],
        extra_compile_args=[PASSES.get(name, "-O3"), DEBUGGING, "-Wno-unused-function"],
    )


def of_bench() -> list[Extension]:
    in_c = [
        Extension(
            f"te_bench.{name}",
            [f"te_bench/{name}.c"],
            depends=COMMON,
            include_dirs=["te"],
            extra_compile_args=["-O2", "-Wall", "-Wextra"],
            extra_link_args=["-pthread"],
        )
        for name in ("_floors", "_copier", "_gpu")
    ]
    return [extension(Path(f"te_bench/{name}.pyx")) for name in ("_null", "_wire")] + in_c


if __name__ == "__main__":  # Cython's processes may import this file once more
    setup(
        ext_modules=[extension(one) for top in TOPS for one in sorted(Path(top).rglob("*.pyx"))],
        cmdclass={"build_ext": BuildOnAllCores},
    )
