"""Syntax trees that the tests of this folder read, parsed once."""

from benchmarks.structure import PRODUCT, modules

PRODUCT_MODULES = modules()
MODULES = modules(packages=(*PRODUCT, "benchmarks"))
TEST_MODULES = modules(packages=("tests",))
