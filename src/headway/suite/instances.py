"""The tables of a suite that name its engines, and the settings that those are to share."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from headway.engines.container import BY_DIGEST
from headway.engines.launcher import SETTINGS
from headway.engines.servers import LAUNCHERS, SPOKEN, launcher_of
from headway.engines.servers.dialects import DIALECTS
from headway.engines.servers.given import PLACEHOLDERS, unknown_placeholder
from headway.suite.shape import Instance
from headway.tables import Reader

DTYPES = ("float32", "bfloat16", "float16")
TUNINGS = ("vendor", "equal")
_SPOKEN_ARGS = ("dialect", "served_model")
_GIVEN_ARGS = ("command", "health")
_OF_STARTED = ("image", "python", "source", "gpus", "port", "env")
_BY_DIGEST = "repo/name@sha256:DIGEST"
_PRINTABLE = re.compile(r"[!-~]*")


class InstanceReader(Reader):
    """Reads the engines of a suite."""

    def instance(
        self, name: str, table: Any, equal: Mapping[str, Any], model: str, dtype: str
    ) -> Instance:
        """Read one engine; `equal`, `model` and `dtype` are the suite's."""
        where = f"engine.{name}"
        if not isinstance(table, dict):
            raise self.fail(where, f"is {table!r}; it must be a table")
        self.known(where, table, _ENGINE_KEYS)
        kind = self.get(where, table, "kind", str, None)
        if kind is None:
            raise self.fail(f"{where}.kind", "is missing")
        dtype = self.get(where, table, "dtype", str, dtype)
        env = self.get(where, table, "env", dict, {})
        if not all(isinstance(value, str) for value in env.values()):
            raise self.fail(f"{where}.env", "must hold strings only")
        args = self.get(where, table, "args", dict, {})
        self._check_args(where, kind, args)
        self._check_place(where, table, kind)
        started = launcher_of(kind, args).command is not None
        return Instance(
            name=self.name(where, name),
            kind=kind,
            model=self.get(where, table, "model", str, model),
            dtype=self.choice(f"{where}.dtype", dtype, DTYPES),
            args=args,
            env=env,
            python=self.get(where, table, "python", str, None),
            source=self._source(where, table),
            port=self.positive(where, table, "port", int, None, most=65535),
            start_timeout_s=self.positive(
                where, table, "start_timeout_s", float, 600.0 if started else 60.0
            ),
            api_key_env=self.get(where, table, "api_key_env", str, None),
            gpus=self._gpus(where, table),
            image=self.get(where, table, "image", str, None),
            base_url=self._base_url(where, table),
            tuning=self._tuning(where, table, kind, equal),
            optional=self.get(where, table, "optional", bool, False),
        )

    def _check_args(self, where: str, kind: str, args: Mapping[str, Any]) -> None:
        """Check the arguments of kinds whose arguments are ours and not a server's."""
        if kind not in SPOKEN:
            return
        where = f"{where}.args"
        self.known(where, args, _SPOKEN_ARGS if kind == "http" else (*_SPOKEN_ARGS, *_GIVEN_ARGS))
        dialect = self.get(where, args, "dialect", str, "openai")
        self.choice(f"{where}.dialect", dialect, tuple(DIALECTS))
        self.get(where, args, "served_model", str, None)
        health = self.get(where, args, "health", str, "/")
        if not health.startswith("/"):
            raise self.fail(f"{where}.health", f"is {health!r}; it must be a path such as /health")
        words = self.get(where, args, "command", list, [])
        if not all(isinstance(word, str) for word in words):
            raise self.fail(f"{where}.command", f"is {words!r}; it must be a list of strings")
        if kind == "command" and not words:
            raise self.fail(f"{where}.command", 'is missing: ["my-server", "--port", "{port}"]')
        unknown = unknown_placeholder(words)
        if unknown is not None:
            known = ", ".join(f"{{{name}}}" for name in PLACEHOLDERS)
            raise self.fail(f"{where}.command", f"has {{{unknown}}}; there are {known}")

    def _check_place(self, where: str, table: Mapping[str, Any], kind: str) -> None:
        """Check that a kind has what says where it runs, and nothing that says otherwise."""
        if kind == "http":
            if "base_url" not in table:
                raise self.fail(f"{where}.base_url", "is missing: kind http is a running server's")
            unfit = [key for key in _OF_STARTED if key in table]
            if unfit:
                raise self.fail(f"{where}.{unfit[0]}", "is of engines that we start; kind is http")
            return
        if "base_url" in table:
            message = f"is of a server that runs already, kind http; a {kind} is started here"
            raise self.fail(f"{where}.base_url", message)
        environment = launcher_of(kind).environment
        if "python" in table and environment == "none":
            message = f"is nothing that kind {kind} runs in; args.command says what is run"
            raise self.fail(f"{where}.python", message)
        if "image" in table:
            self._check_image(where, table, kind)
        elif kind == "image":
            raise self.fail(f"{where}.image", f"is missing: {_BY_DIGEST}")
        elif environment == "given" and "python" not in table:
            message = f"needs python or image beside it: Headway has no environment for {kind}"
            raise self.fail(f"{where}.kind", message)

    def _check_image(self, where: str, table: Mapping[str, Any], kind: str) -> None:
        image = self.get(where, table, "image", str, "")
        if not BY_DIGEST.fullmatch(image):
            raise self.fail(f"{where}.image", f"is {image!r}; it must be pinned: {_BY_DIGEST}")
        if kind == "command" or not launcher_of(kind).image:
            able = [name for name, one in LAUNCHERS.items() if one.image and name != "command"]
            message = f"is for kinds {', '.join(able)}; {kind} runs in no image"
            raise self.fail(f"{where}.image", message)
        python = self.get(where, table, "python", str, "python3")
        if "/" in python and not python.startswith("/"):
            message = f"is {python!r}; in an image it must be a name or an absolute path"
            raise self.fail(f"{where}.python", message)
        if "source" in table:
            raise self.fail(f"{where}.source", "builds nothing for an image")
        if "engine_dir" in self.get(where, table, "args", dict, {}):
            raise self.fail(f"{where}.args.engine_dir", "is not in the image; leave image out")

    def _base_url(self, where: str, table: Mapping[str, Any]) -> str | None:
        """Read where a server is; what we ask for begins with /v1, so it ends before that."""
        given: str | None = self.get(where, table, "base_url", str, None)
        if given is None:
            return None
        try:
            url = urlsplit(given)
            fine = url.scheme in ("http", "https") and url.hostname and url.port != 0
        except ValueError:
            fine = False
        if not fine or url.query or url.fragment or url.username or not _PRINTABLE.fullmatch(given):
            message = f"is {given!r}; it must look like http://host:port or https://host/path"
            raise self.fail(f"{where}.base_url", message)
        return given.rstrip("/").removesuffix("/v1").rstrip("/")

    def equal(self, table: Mapping[str, Any]) -> Mapping[str, Any]:
        """Read the settings that engines tuned equally share."""
        self.known("equal", table, SETTINGS)
        for name in SETTINGS:
            if name == "prefix_caching":
                self.get("equal", table, name, bool, None)
            else:
                self.positive("equal", table, name, int, None)
        return dict(table)

    def _source(self, where: str, table: Mapping[str, Any]) -> str | None:
        source: str | None = self.get(where, table, "source", str, None)
        start, _, revision = (source or "").partition("git:")
        if source is not None and (start or not revision.strip("-")):
            raise self.fail(f"{where}.source", f"is {source!r}; it must be git:REV")
        return source

    def _gpus(self, where: str, table: Mapping[str, Any]) -> tuple[str, ...]:
        gpus = self.get(where, table, "gpus", list, [])
        if not all(
            (type(gpu) is int and gpu >= 0) or (isinstance(gpu, str) and gpu) for gpu in gpus
        ):
            raise self.fail(f"{where}.gpus", f"is {gpus!r}; it must hold numbers or UUIDs of GPUs")
        return tuple(map(str, gpus))

    def _tuning(
        self, where: str, table: Mapping[str, Any], kind: str, equal: Mapping[str, Any]
    ) -> str:
        tuning: str = self.get(where, table, "tuning", str, "vendor")
        self.choice(f"{where}.tuning", tuning, TUNINGS)
        if tuning == "equal" and not equal:
            raise self.fail(f"{where}.tuning", "is 'equal', and there is no [equal] to share")
        known = launcher_of(kind).equal
        missing = [name for name in equal if name not in known] if tuning == "equal" else []
        if missing:
            has = f"it has {', '.join(known)}" if known else "it has none of these settings"
            message = f"is 'equal', but {kind} has no {missing[0]} to set; {has}"
            raise self.fail(f"{where}.tuning", message)
        return tuning


_ENGINE_KEYS = (
    *("kind", "model", "dtype", "args", "env", "python", "source", "port", "start_timeout_s"),
    "api_key_env",
    *("reference", "gpus", "image", "base_url", "tuning", "optional"),
)
