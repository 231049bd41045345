"""Change one thing in a pure module, run its tests, and report every change that no test notices.

Some survivors are equivalent to the original, and no test can notice them: read what is printed.

Maintained tools were tried: mutmut 3.8.1 leaves out decorated functions and whatever is outside of a function (14 % of
the mutants below), and negates no `if`; cosmic-ray 8.7.0 imports torch for each mutant, which takes 4 seconds.
"""

import argparse
import ast
import os
import signal
import sys
from collections.abc import Iterator
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
MODULES = (
    "batch_search/search", "training/amp/scale_history", "training/amp/learning_rate", "training/amp/diagnosis",
    "results/equivalence", "results/compare", "results/max_batch", "results/train",
    "report/train", "runner/ranks", "config/values",
)  # fmt: skip
"""Under amp_track/; the tests of batch_search/search are tests/batch_search/test_search.py."""
SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult, ast.Pow: ast.Mult, ast.BitOr: ast.BitAnd,
}  # fmt: skip
NAMES = {"min": "max", "max": "min", "any": "all", "all": "any", "math.floor": "math.ceil", "math.ceil": "math.floor"}


def slots(node: ast.AST) -> Iterator[tuple[Any, Any, str]]:
    """Yield the place of each node whose behaviour a test could notice: container, key, and the field's name."""
    for field, value in ast.iter_fields(node):
        place: Any = (value, range(len(value))) if isinstance(value, list) else (vars(node), [field])
        for key in place[1] if field not in ("annotation", "returns", "decorator_list") else ():
            child = place[0][key]
            is_text = isinstance(node, ast.JoinedStr | ast.Expr) and isinstance(child, ast.Constant)
            if isinstance(child, ast.AST) and not is_text and not isinstance(child, ast.Assert):
                yield place[0], key, field
                yield from slots(child)


def replacements(node: ast.AST) -> Iterator[ast.AST]:
    """Yield what may stand in a node's place to see whether a test notices."""
    fields = dict(ast.iter_fields(node))
    match node:
        case ast.Compare(ops=ops):
            for at, op in enumerate(ops):
                yield ast.Compare(**fields | {"ops": [*ops[:at], SWAPS[type(op)](), *ops[at + 1 :]]})
        case ast.BinOp(op=op) | ast.BoolOp(op=op) if type(op) in SWAPS:
            yield type(node)(**fields | {"op": SWAPS[type(op)]()})
        case ast.AugAssign(op=op):
            yield from (ast.AugAssign(**fields | {"op": SWAPS[type(op)]()}), ast.Pass())
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
            yield operand
        case ast.Constant(value=bool(value)):
            yield ast.Constant(not value)
        case ast.Constant(value=int(value) | float(value)):
            yield from (ast.Constant(value + 1), ast.Constant(value - 1))
        case ast.Constant(value=str(value)) if " " not in value:
            yield ast.Constant(value + "XX")
        case ast.Name() | ast.Attribute() if ast.unparse(node) in NAMES:
            yield ast.parse(NAMES[ast.unparse(node)], mode="eval").body
        case ast.Return(value=ast.expr() as value) if ast.unparse(value) != "None":
            yield ast.Return(ast.Constant(None))
        case ast.Raise() | ast.Continue() | ast.Assign(targets=[ast.Attribute()]) | ast.Expr(value=ast.Call()):
            yield ast.Pass()


def mutants(file: Path) -> list[tuple[int, str, CodeType]]:
    """Return every mutant: the number of its line, the change, and the whole module with it."""
    tree, found = ast.parse(file.read_text()), []
    for container, key, field in list(slots(tree)):
        node = container[key]
        has_opposite = field in ("test", "ifs") and not isinstance(node, ast.Compare | ast.UnaryOp)  # theirs is a swap
        for new in (*replacements(node), *([ast.UnaryOp(ast.Not(), node)] if has_opposite else [])):
            container[key] = new
            code = compile(ast.fix_missing_locations(tree), str(file), "exec")
            container[key] = node
            change = " ".join(f"{ast.unparse(node)} -> {ast.unparse(new)}".split())
            found.append((node.lineno, change, code))
    return sorted(found, key=lambda mutant: mutant[0])


def pytest_passes(tests: Path) -> bool:
    """Run tests with everything of this repository imported anew, and everything else as it has been imported."""
    for name, module in list(sys.modules.items()):
        file = str(getattr(module, "__file__", None))
        if file.startswith(f"{ROOT}/") and ".venv" not in file and name != "__main__":
            del sys.modules[name]
    options = ["-xqq", "-pno:cacheprovider", "-pno:unraisableexception", "-otmp_path_retention_policy=none"]
    addopts = ["-oaddopts=--import-mode=importlib", "-m", "not slow and not nightly and not gpu"]
    return pytest.main([*options, *addopts, str(tests)]) == pytest.ExitCode.OK


def is_noticed(code: CodeType, file: Path, tests: Path) -> bool:
    """Run the tests in a fork, where the module is the mutant; what does not end has been noticed too."""
    if child := os.fork():
        return os.waitpid(child, 0)[1] != 0
    signal.alarm(120)  # its signal ends the process
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    loader: Any = SourceFileLoader
    original, replaced = loader.get_code, {str(file): code}
    loader.get_code = lambda self, name: replaced.get(self.path) or original(self, name)
    try:
        os._exit(not pytest_passes(tests))
    finally:
        os._exit(1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--module", default="", help="only modules whose path has this in it")
    parser.add_argument("--sample", type=int, default=10**6, metavar="N", help="only about N mutants of each")
    parser.add_argument("--list", action="store_true", help="list the mutants, and run nothing")
    options = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HYPOTHESIS_PROFILE": "quick"}  # safe to fork
    sys.path.insert(0, str(ROOT))
    is_enough = True
    for module in (module for module in MODULES if options.module in module):
        file = ROOT / f"amp_track/{module}.py"
        tests = ROOT / "tests" / Path(module).with_name(f"test_{file.name}")
        if not options.list and not pytest_passes(tests):
            sys.exit(f"{tests} fails without any mutation, expected a pass; fix that first")
        chosen, killed = (every := mutants(file))[:: max(len(every) // options.sample, 1)], 0
        for line, change, code in chosen:
            if not options.list and is_noticed(code, file, tests):
                killed += 1
            else:
                print(f"{file.relative_to(ROOT)}:{line}: {change}", flush=True)
        if options.list:
            continue
        total = len(chosen)
        print(f"{module}: {killed} of {total} mutants killed ({killed / total:.1%})", flush=True)
        is_enough &= killed >= 0.9 * total
    return not is_enough


if __name__ == "__main__":
    sys.exit(main())
