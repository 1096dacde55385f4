"""``python -m tests.mutants [NAMES]``: which test sees each planted fault of faults.txt.

One process imports torch, Titan, titan_ext and what ranks need, and forks a child for each fault.
The child puts the fault's code into the functions that are there already, in half a second, and
forks the server of its ranks before a test has run a backward. Only processes that a test starts
anew import titan_ext again: from a copy of it that has the fault.
"""

# ruff: noqa: E402
import argparse
import ast
import atexit
import contextlib
import gc
import importlib
import multiprocessing.forkserver
import multiprocessing.util
import os
import pkgutil
import shutil
import signal
import sys
import time
import traceback
import types
import unittest.mock
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tests.helpers.preload  # noqa: F401

gc.disable()

import pytest

import titan_ext
from tests.mutants import ROOT, Fault, read_faults

_OUT = ROOT / "outputs" / "mutants"
_NO_FUNCTION = ("comp>", "<genexpr>")
_Functions = dict[tuple[str, str], list[types.FunctionType]]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("names", nargs="*", help="faults; default: all")
    parser.add_argument("--jobs", type=int, default=2, help="faults at a time")
    parser.add_argument("--limit", type=float, default=900, help="seconds by the clock for each")
    arguments = parser.parse_args()
    faults = read_faults()
    known = {fault.name: fault for fault in faults}
    if unknown := set(arguments.names) - {*known, "none"}:
        parser.error(f"no fault is called {', '.join(sorted(unknown))}")
    # "none" plants nothing in front of all of these tests: it has to survive.
    tests = dict.fromkeys(test for fault in faults for test in fault.tests)
    known["none"] = Fault("none", faults[0].file, "", "", tuple(tests))
    todo = [known[name] for name in arguments.names] or faults
    functions = _functions()
    live: dict[int, tuple[Fault, float]] = {}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    try:
        seen = _run(list(todo), live, functions, arguments)
    finally:
        for pid in live:
            os.killpg(pid, signal.SIGKILL)
    planted = Counter(fault.folder for fault in todo if fault.old)
    for folder, count in planted.items():
        print(f"{folder}: {seen[folder]} of {count} seen")
    print(f"{seen.total()} of {planted.total()} seen")
    return 0 if seen == planted else 1


def _run(waiting: list[Fault], live: Any, functions: _Functions, arguments: Any) -> Counter[str]:
    """Say what became of each; return how many of a folder were seen."""
    seen = Counter[str]()
    while waiting or live:
        while waiting and len(live) < arguments.jobs:
            fault = waiting.pop(0)
            if not (pid := os.fork()):
                _plant_and_test(fault, functions)
            live[pid] = fault, time.monotonic()
        time.sleep(0.1)
        for pid, (fault, begun) in list(live.items()):
            late = time.monotonic() - begun > arguments.limit
            if late:
                os.killpg(pid, signal.SIGKILL)
            ended, status, used = os.wait4(pid, 0 if late else os.WNOHANG)
            if not ended:
                continue
            del live[pid]
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)  # ranks that nobody waits for
            said = _OUT / fault.name / "seen"
            test = ", ".join(said.read_text().splitlines()) if said.exists() else ""
            seen[fault.folder] += bool(test)
            broken = f"BROKEN, see {_OUT / fault.name / 'log'}" if status else "SURVIVED"
            test = test or ("stopped at the limit" if late else broken)
            cpu_s = used.ru_utime + used.ru_stime
            print(f"{fault.name:20} {fault.file:45} {test}, {cpu_s:.0f} CPU s", flush=True)
    return seen


class _Seen:
    """Writes which tests are red."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        items.sort(key=lambda item: "tmp_path_factory" in item.fixturenames)  # ranks come last

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            with self._file.open("a") as file:
                file.write(f"{report.nodeid.removeprefix('tests/')}\n")


def _plant_and_test(fault: Fault, functions: _Functions) -> None:
    """In the child: the end of the process is the end of this."""
    code: int = 3
    try:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        folder = _OUT / fault.name
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(ROOT / "titan_ext", folder / "titan_ext")
        log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 1)
        os.dup2(log, 2)
        if fault.old:
            (folder / fault.file).write_text(_plant(fault, functions))
        os.environ["PYTHONPATH"] = str(folder)
        with unittest.mock.patch.object(multiprocessing.util, "spawnv_passfds", _fork_instead):
            multiprocessing.forkserver.ensure_running()
        gc.enable()
        options = ["-q", "-m", "not slow", "-p", "no:cacheprovider", "-p", "no:xdist"]
        options += ["-x"] if fault.old else []
        tests = [f"tests/{test}" for test in fault.tests]
        code = pytest.main([*options, *tests], plugins=[_Seen(folder / "seen")])
        server: Any = multiprocessing.forkserver._forkserver
        os.kill(server._forkserver_pid, signal.SIGKILL)
        os.waitpid(server._forkserver_pid, 0)  # so that its ranks count
        shutil.rmtree(folder / "titan_ext")
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        # A red test is no failure of this process; a test that does not exist is.
        os._exit(0 if code in (0, 1) else 3)


def _functions() -> _Functions:
    """Those of titan_ext, by file and name, closures and what decorators hide included."""
    for module in pkgutil.walk_packages(titan_ext.__path__, "titan_ext."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    gc.unfreeze()
    found: _Functions = {}
    for thing in gc.get_objects():
        if type(thing) is types.FunctionType:
            place = thing.__code__.co_filename, thing.__code__.co_qualname
            found.setdefault(place, []).append(thing)
    gc.freeze()
    return found


def _plant(fault: Fault, functions: _Functions) -> str:
    """Put the fault into what is imported; return the text of its file with it."""
    path = str(ROOT / fault.file)
    text = Path(path).read_text()
    faulty = text.replace(fault.old, fault.new)
    before, after = (_codes(compile(source, path, "exec")) for source in (text, faulty))
    planted = 0
    for old, new in zip(before, after, strict=True):
        for function in functions.get((path, old.co_qualname), ()) if new != old else ():
            if function.__code__ == old:  # lambdas share a name
                function.__code__ = new
                planted += 1
    for old, new in zip(ast.parse(text).body, ast.parse(faulty).body, strict=True):
        if isinstance(new, ast.Assign | ast.AnnAssign) and ast.dump(old) != ast.dump(new):
            planted += _assign(new, path, fault)
    assert planted, "nothing was planted"
    return faulty


def _assign(statement: ast.Assign | ast.AnnAssign, path: str, fault: Fault) -> int:
    """A constant of a module, and of those that have imported it by its name."""
    module = sys.modules[fault.file.removesuffix(".py").replace("/", ".")].__dict__
    target = statement.targets[0] if isinstance(statement, ast.Assign) else statement.target
    assert isinstance(target, ast.Name)
    old = module[target.id]
    exec(compile(ast.Module([statement], []), path, "exec"), module)
    for other in list(sys.modules.values()):
        if getattr(other, "__dict__", {}).get(target.id) is old:
            setattr(other, target.id, module[target.id])
    return 1


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """Of functions: what a comprehension has is a constant of its function."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType) and not constant.co_name.endswith(_NO_FUNCTION):
            yield from _codes(constant)


def _fork_instead(path: str, arguments: list[str], passed: list[int]) -> int:
    """The fork server as a fork of this process, which has imported all and has the fault."""
    if pid := os.fork():
        return pid
    with contextlib.suppress(SystemExit):
        exec(arguments[-1], {})
    os._exit(0)


if __name__ == "__main__":
    atexit.unregister(os._exit)  # tests.helpers.preload registers it, with 0
    sys.exit(main())
