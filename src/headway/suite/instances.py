"""The tables of a suite that name its engines, and the settings that those are to share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headway.engines.launcher import SETTINGS
from headway.engines.servers import launcher_of
from headway.suite.shape import Instance
from headway.tables import Reader

DTYPES = ("float32", "bfloat16", "float16")
TUNINGS = ("vendor", "equal")


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
        return Instance(
            name=self.name(where, name),
            kind=kind,
            model=self.get(where, table, "model", str, model),
            dtype=self.choice(f"{where}.dtype", dtype, DTYPES),
            args=self.get(where, table, "args", dict, {}),
            env=env,
            python=self.get(where, table, "python", str, None),
            source=self._source(where, table),
            port=self.positive(where, table, "port", int, None, most=65535),
            start_timeout_s=self.positive(where, table, "start_timeout_s", float, 600.0),
            api_key_env=self.get(where, table, "api_key_env", str, None),
            gpus=self._gpus(where, table),
            image=self.get(where, table, "image", str, None),
            base_url=self.get(where, table, "base_url", str, None),
            tuning=self._tuning(where, table, kind, equal),
            optional=self.get(where, table, "optional", bool, False),
        )

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
        if source is not None and not source.removeprefix("git:").strip("-"):
            raise self.fail(f"{where}.source", f"is {source!r}; it must be git:REV")
        if source is not None and not source.startswith("git:"):
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
