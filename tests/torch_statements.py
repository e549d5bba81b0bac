"""How much of each lesson's code is torch's own: `python3 tests/torch_statements.py`.

A statement counts if it calls torch, a module, an optimizer or a method of a tensor. Imports, printing,
questions to the learner, docstrings and the headers of definitions and of `with on_gpu():` are no statements
here. What a name stands for follows from what was assigned to it.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

SOURCES = Path(__file__).parents[1] / "notebooks" / "src"
HEADERS = (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef, ast.Import, ast.ImportFrom, ast.Pass, ast.Try)
ASIDE = ("print", "display", "predict", "reveal", "waits_for", "quiz")
LOOKS_SO = ("model", "network", "optimizer", "loss", "layer", "block", "scaler", "tensor")
"""Parameters of a function of these names are modules, optimizers and tensors."""


class Statements:
    """Goes through a lesson's cells in order, and knows which names stand for something of torch."""

    def __init__(self) -> None:
        self.known: set[str] = set()
        self.all, self.torch = 0, 0

    def of_torch(self, node: ast.AST | None) -> bool:
        """True if an expression is something of torch's, or made of it."""
        if isinstance(node, ast.Name):
            return node.id in self.known
        if isinstance(node, ast.Attribute | ast.Subscript | ast.Starred):
            return self.of_torch(node.value)
        if isinstance(node, ast.Call):
            return self.of_torch(node.func)
        if isinstance(node, ast.BinOp):
            return self.of_torch(node.left) or self.of_torch(node.right)
        if isinstance(node, ast.List | ast.Tuple):
            return any(map(self.of_torch, node.elts))
        if isinstance(node, ast.ListComp | ast.GeneratorExp):
            self.learn_loops(node.generators)
            return self.of_torch(node.elt)
        return False

    def learn_loops(self, loops: list[ast.comprehension]) -> None:
        for loop in loops:
            self.assign(loop.target, self.of_torch(loop.iter))

    def assign(self, target: ast.AST, made_of_torch: bool) -> None:
        for name in ast.walk(target):
            if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store):
                (self.known.add if made_of_torch else self.known.discard)(name.id)

    def calls_torch(self, expressions: list[ast.AST]) -> bool:
        for expression in expressions:
            for node in ast.walk(expression):
                if isinstance(node, ast.ListComp | ast.GeneratorExp | ast.DictComp | ast.SetComp):
                    self.learn_loops(node.generators)
            if any(isinstance(node, ast.Call) and self.of_torch(node.func) for node in ast.walk(expression)):
                return True
            if any(isinstance(node, ast.BinOp) and self.of_torch(node) for node in ast.walk(expression)):
                return True
        return False

    def enter(self, node: ast.AST) -> None:
        """Learn what imports and headers of definitions bring."""
        if isinstance(node, ast.Import | ast.ImportFrom):
            root = getattr(node, "module", None)
            for alias in node.names:
                if (root or alias.name).split(".")[0] in ("torch", "torchao"):
                    self.known.add(alias.asname or (alias.name if root else alias.name.split(".")[0]))
        if isinstance(node, ast.FunctionDef):
            for argument in (*node.args.args, *node.args.kwonlyargs):
                said = ast.unparse(argument.annotation) if argument.annotation else ""
                if argument.arg in LOOKS_SO or "torch" in said or "Tensor" in said:
                    self.known.add(argument.arg)
        if isinstance(node, ast.ClassDef) and any(map(self.of_torch, node.bases)):
            self.known |= {node.name, "self"}
            for each in ast.walk(node):
                if isinstance(each, ast.FunctionDef) and each.name == "forward":
                    self.known |= {argument.arg for argument in each.args.args}

    def read(self, statements: list[ast.stmt]) -> None:
        for node in statements:
            self.enter(node)
            if not isinstance(node, HEADERS) and not _prints(node):
                self.all += 1
                self.torch += self.calls_torch(_own_expressions(node))
            for target, value in _bound(node):
                self.assign(target, self.of_torch(value))
            for body in ("body", "orelse", "finalbody"):
                self.read(getattr(node, body, []))
            for handler in getattr(node, "handlers", []):
                self.read(handler.body)


def _own_expressions(node: ast.stmt) -> list[ast.AST]:
    """The expressions of a statement, without the statements inside of it."""
    if isinstance(node, ast.With):
        return [item.context_expr for item in node.items]
    return [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr)]


def _bound(node: ast.stmt) -> Iterator[tuple[ast.AST, ast.AST | None]]:
    if isinstance(node, ast.Assign):
        for target in node.targets:
            yield from _pairs(target, node.value)
    elif isinstance(node, ast.For):
        yield node.target, node.iter
    elif isinstance(node, ast.With):
        yield from ((item.optional_vars, item.context_expr) for item in node.items if item.optional_vars)


def _pairs(target: ast.expr, value: ast.expr) -> Iterator[tuple[ast.expr, ast.expr]]:
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        yield from zip(target.elts, value.elts, strict=False)
    else:
        yield target, value


def _prints(node: ast.stmt) -> bool:
    """True for a docstring, for what only prints or asks the learner, and for the header of a block on the
    GPU.
    """
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return True
    if isinstance(node, ast.With):
        return all(_called(item.context_expr) == "on_gpu" for item in node.items)
    return isinstance(node, ast.Expr) and _called(node.value) in ASIDE


def _called(node: ast.expr) -> str:
    return node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""


def cells(path: Path) -> list[str]:
    """The code cells of a lesson's source."""
    parts = re.split(r"(?m)^# %%(.*)$", path.read_text())
    return [body for mark, body in zip(parts[1::2], parts[2::2], strict=True) if "[markdown]" not in mark]


def words(path: Path) -> int:
    """Words of a lesson's text, without its code."""
    parts = re.split(r"(?m)^# %%(.*)$", path.read_text())
    text = " ".join(body for mark, body in zip(parts[1::2], parts[2::2], strict=True) if "[markdown]" in mark)
    prose = re.sub(r"\]\([^)]*\)|^# ?|```.*?```", " ", text, flags=re.M | re.S)
    return len(re.findall(r"[^\W_]+(?:['’.,-][^\W_]+)*", prose))


def counted(path: Path) -> tuple[int, int]:
    """A lesson's statements, and how many of them call torch."""
    found = Statements()
    for cell in cells(path):
        lines = [line for line in cell.splitlines() if not line.startswith(("%", "!"))]
        found.read(ast.parse("\n".join(lines)).body)
    return found.all, found.torch


def main() -> None:
    print(
        f"{'lesson':40} {'minutes':>7} {'words':>6} {'cells':>5} {'statements':>10} {'torch':>5} {'share':>6}"
    )
    for path in sorted(Path(sys.argv[1] if len(sys.argv) > 1 else SOURCES).glob("[01]*.py")):
        everything, torch = counted(path)
        minutes = re.search(r"minutes: (\d+)", path.read_text())
        share = f"{torch / max(1, everything):.0%}"
        row = f"{minutes[1] if minutes else '':>7} {words(path):6,} {len(cells(path)):5} {everything:10}"
        print(f"{path.stem:40} {row} {torch:5} {share:>6}")


if __name__ == "__main__":
    main()
