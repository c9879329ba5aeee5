"""Read from a released wheel which flags its server takes and which fields its requests have.

    python extract.py WHEEL > NAME.json

Nothing of the wheel is run: its source is parsed. What is found by rule, and not by running the
parser, may hold more than a given configuration takes; what is not in it is taken by none.
"""

from __future__ import annotations

import ast
import json
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path


def classes(tree: ast.Module) -> dict[str, ast.ClassDef]:
    return {node.name: node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}


def fields(known: dict[str, ast.ClassDef], name: str) -> list[str]:
    """The public fields of a class, those of its bases included, and the aliases they go by."""
    if name not in known:
        return []
    node = known[name]
    found = [field for base in node.bases for field in fields(known, ast.unparse(base))]
    for line in node.body:
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
            if "ClassVar" in ast.unparse(line.annotation):
                continue
            found += [] if line.target.id.startswith("_") else [line.target.id]
            if line.value is not None:
                found += keyword_texts(line.value, ("alias", "validation_alias"))
    return found


def keyword_texts(node: ast.AST, names: tuple[str, ...]) -> list[str]:
    found = []
    for call in ast.walk(node):
        if isinstance(call, ast.Call):
            for keyword in call.keywords:
                if keyword.arg in names:
                    found += texts(keyword.value)
    return found


def texts(node: ast.AST) -> list[str]:
    """Every string constant below a node."""
    return [
        one.value
        for one in ast.walk(node)
        if isinstance(one, ast.Constant) and isinstance(one.value, str)
    ]


def added(tree: ast.AST) -> Iterator[str]:
    """The flags of all calls of add_argument, and of click's option."""
    for call in ast.walk(tree):
        name = call.func.attr if isinstance(call, ast.Call) and hasattr(call.func, "attr") else ""
        if name in ("add_argument", "option"):
            plain = [one for one in call.args if isinstance(one, ast.Constant)]
            yield from (t for one in plain for t in texts(one) if t.startswith("--"))


def of_fields(names: list[str]) -> list[str]:
    return [f"--{name.replace('_', '-')}" for name in names]


def sglang(trees: dict[str, ast.Module]) -> dict[str, list[str]]:
    """Flags are annotated fields of the namespaces in arg_groups/fields, but those with no_cli."""
    root, flags = "sglang/srt", list(added(trees["sglang/srt/server_args.py"]))
    for path, tree in trees.items():
        if path.startswith(f"{root}/arg_groups/fields/"):
            for line in ast.walk(tree):
                if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
                    said = ast.unparse(line.annotation)
                    if said.startswith("A[") and "no_cli=True" not in said:
                        own = keyword_texts(line.annotation, ("cli_name", "aliases"))
                        flags += [*of_fields([line.target.id]), *own]
    asked = classes(trees[f"{root}/entrypoints/openai/protocol.py"])
    return {
        "flags": flags,
        "completions": fields(asked, "CompletionRequest"),
        "chat": fields(asked, "ChatCompletionRequest"),
        "stream_options": fields(asked, "StreamOptions"),
    }


def vllm(trees: dict[str, ast.Module]) -> dict[str, list[str]]:
    """Flags are those added by name, and the fields of the server's own arguments."""
    flags = list(added(trees["vllm/engine/arg_utils.py"]))
    front = trees["vllm/entrypoints/launchers/cli_args.py"]
    flags += [*added(front)]
    for name in ("BaseFrontendArgs", "FrontendArgs"):
        flags += of_fields(fields(classes(front), name))
    root, asked = "vllm/entrypoints/openai", {}
    for path in trees:
        if path.startswith("vllm/entrypoints/") and path.endswith("/protocol.py"):
            asked |= classes(trees[path])
    known = asked | classes(trees[f"{root}/completion/protocol.py"])
    return {
        "flags": flags,
        "completions": fields(known, "CompletionRequest"),
        "chat": fields(known, "ChatCompletionRequest"),
        "stream_options": fields(known, "StreamOptions"),
    }


RULES = {"sglang": sglang, "vllm": vllm}


def read(wheel: Path) -> dict[str, object]:
    """What a wheel says."""
    project, version = wheel.name.split("-")[:2]
    with zipfile.ZipFile(wheel) as archive:
        paths = [
            name
            for name in archive.namelist()
            if name.endswith(".py") and ("/entrypoints/" in name or "arg" in name)
        ]
        trees = {path: ast.parse(archive.read(path)) for path in paths}
    found = {name: sorted(set(names)) for name, names in RULES[project](trees).items()}
    return {"project": project, "version": version, "from": wheel.name, **found}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(read(Path(sys.argv[1])), indent=1) + "\n")
