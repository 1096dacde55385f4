"""That each fault of faults.txt can still be planted; ``make mutants`` says which test sees it."""

import ast
from collections import Counter

import pytest

from tests.mutants import ROOT, Fault, read_faults

FAULTS = read_faults()
FOLDERS = {path.parent.name for path in (ROOT / "titan_ext").glob("*/*.py")}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_can_be_planted(fault: Fault):
    text = (ROOT / fault.file).read_text()
    assert text.count(fault.old) == 1, f"{fault.file} has it {text.count(fault.old)} times"
    assert fault.old != fault.new
    ast.parse(text.replace(fault.old, fault.new))
    assert fault.tests
    for test in fault.tests:
        file, _, function = test.partition("::")
        assert (path := ROOT / "tests" / file).exists(), test
        assert not function or f"def {function.partition('[')[0]}" in path.read_text(), test


def test_there_are_enough_of_them_everywhere():
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 120
    assert Counter(fault.folder for fault in FAULTS).keys() == FOLDERS
