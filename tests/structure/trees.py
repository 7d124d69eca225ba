"""Syntax trees of product, benchmarks and tests, parsed once for all tests of this folder."""

from benchmarks.structure import PRODUCT, modules

PRODUCT_MODULES = modules()
MODULES = modules(packages=(*PRODUCT, "benchmarks"))
TEST_MODULES = modules(packages=("tests",))
