"""Commands of the server: serve, calibrate, vllm-check."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from kvlingo.commands.console import FAILED, emit, stoppable, tell
from kvlingo.commands.options import (
    AsJson,
    CheckedType,
    Device,
    Dtype,
    Routing,
    Served,
    Texts,
    Translators,
    numbers,
)
from kvlingo.errors import MissingExtra


def serve(
    model: Served = None,
    translator: Translators = None,
    engine: Annotated[
        str | None,
        typer.Option(
            metavar="vllm=URL,URL",
            help="Stand before vLLM servers with KV-Lingo's connector (docs/vllm.md) instead of loading models: a switch passes "
            "on which kept cache to go on from. Their API key, if they ask for one: KVLINGO_ENGINE_KEY.",
            show_default=False,
        ),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(help="TOML file of settings; the environment (KVLINGO_PORT, …) and flags go before it."),
    ] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on. Default: 127.0.0.1.")] = None,
    port: Annotated[int | None, typer.Option(help="Default: 8000.")] = None,
    keys: Annotated[
        Path | None, typer.Option(help="File of API keys, lines NAME: SHA256 (printf %s KEY | sha256sum).")
    ] = None,
    anyone: Annotated[
        bool | None, typer.Option("--anyone", help="Let everyone on the network in, without keys.")
    ] = None,
    rate: Annotated[int | None, typer.Option(help="Requests a minute for each key. Default: no limit.")] = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="Of an answer whose request names none. Default: 1024.")
    ] = None,
    router: Annotated[
        Routing | None,
        typer.Option(
            help="Who decides which model answers auto: nobody, length and turn, the small model's own doubt about its "
            "answer, what `kvlingo route fit` learned, or its doubt about each token. Default: explicit, auto is refused.",
            show_default=False,
        ),
    ] = None,
    small: Annotated[str | None, typer.Option(help="The router's small model. Default: small.")] = None,
    big: Annotated[str | None, typer.Option(help="The router's big model. Default: big.")] = None,
    rules: Annotated[
        Path | None,
        typer.Option(help="TOML file of limits; its tables: switch (`kvlingo calibrate`), threshold, cascade, token."),
    ] = None,
    learned: Annotated[
        Path | None, typer.Option(metavar="DIR", help="What `kvlingo route fit` wrote, for the router learned.")
    ] = None,
    cache_dir: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Keep on disk what memory has no room for, and all conversations over a restart. They can be read there: "
            "choose a disk that only you read.",
            show_default=False,
        ),
    ] = None,
    cache_disk_bytes: Annotated[
        int | None, typer.Option(metavar="N", help="Bytes that they may take there. Default: 8 GiB.")
    ] = None,
    heal: Annotated[
        bool | None,
        typer.Option("--heal", help="While nothing is asked for, read translated conversations again, exactly."),
    ] = None,
    ahead: Annotated[
        bool | None,
        typer.Option("--ahead", help="While nothing is asked for, translate each answered turn for the other models."),
    ] = None,
    cors_origin: Annotated[
        list[str] | None, typer.Option("--cors-origin", help="Page that may call from a browser; repeatable.")
    ] = None,
    drain: Annotated[
        float | None, typer.Option(help="Seconds that running answers may go on after SIGTERM. Default: 30.")
    ] = None,
    otlp_endpoint: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Collector that gets an OpenTelemetry span for each request. Default: OTEL_EXPORTER_OTLP_ENDPOINT, or none.",
            show_default=False,
        ),
    ] = None,
    dtype: Dtype = None,
    device: Device = None,
) -> None:
    """Serve models by OpenAI's API; a conversation may go on with another of them at any turn."""
    flags = {
        "models": model,
        "translators": translator,
        "engine": engine,
        "host": host,
        "port": port,
        "keys": keys,
        "anyone": anyone,
        "rate_per_minute": rate,
        "max_tokens": max_tokens,
        "router": None if router is None else router.value,
        "small": small,
        "big": big,
        "rules": rules,
        "learned": learned,
        "cache_dir": cache_dir,
        "cache_disk_bytes": cache_disk_bytes,
        "heal": heal,
        "ahead": ahead,
        "cors_origins": cors_origin,
        "drain_s": drain,
        "otlp_endpoint": otlp_endpoint,
        "dtype": dtype,
        "device": device,
    }
    with stoppable("nothing is served"):
        from kvlingo.serve.settings import read_settings

        settings, _ = read_settings(flags, os.environ, config)
        try:
            from kvlingo.serve import gateway
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] not in (
                "fastapi",
                "pydantic",
                "prometheus_client",
                "starlette",
                "uvicorn",
            ):
                raise
            raise MissingExtra(f"serving needs {error.name}: pip install 'kvlingo[serve]'") from error
        from kvlingo.serve.loading import build_engine

        gateway.serve(settings, partial(build_engine, settings, tell))


def calibrate(
    out: Annotated[
        Path, typer.Option(help="TOML file of rules to write, for `kvlingo serve --rules`.", show_default=False)
    ],
    model: Served = None,
    translator: Translators = None,
    lengths: Annotated[str, typer.Option(help="Lengths to measure, in tokens.")] = "128,256,512,1024,2048",
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each, to take the medians of.")] = 3,
    text: Texts = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the rules that are there.")] = False,
    dtype: Dtype = None,
    device: Device = None,
    as_json: AsJson = False,
) -> None:
    """Time hand-overs and re-prefills of the models to be served; write from which length on a switch translates."""
    with stoppable(f"{out} is unchanged; run the same command again"):
        from kvlingo.jobs import Where
        from kvlingo.serve import calibrating, settings
        from kvlingo.serve.routing.rules import NEVER

        found = calibrating.calibrate(
            settings.read_value("models", model or [], "the command line"),
            translator or [],
            out,
            lengths=numbers(lengths, "--lengths"),
            repeats=repeats,
            texts=text or [],
            where=Where(device, dtype),
            overwrite=overwrite,
            tell=tell,
        )
    for each in (one.rule for one in found):
        typer.echo(
            f"{each.source} → {each.target}: reads again up to {each.reprefill_up_to} tokens, translates from "
            + (f"{each.translate_from}" if each.translate_from < NEVER else "no length that was measured")
        )
    emit({"switch": [each.to_json() for each in found]}, as_json)


def vllm_check(
    dtype: Annotated[CheckedType, typer.Option(help="Of the models that it is checked with.")] = CheckedType.float32,
    as_json: AsJson = False,
) -> None:
    """Check that the connector works with the vLLM that is installed here. Exit code 3 where it does not."""
    with stoppable("nothing was written"):
        from kvlingo.serve.external.checking import check_engine_pair

        result = check_engine_pair(dtype.value, tell)
    for check in result["checks"]:
        typer.echo(f"{'passed' if check['passed'] else 'FAILED'}: {check['name']} ({check['what']})")
    typer.echo(f"vLLM {result['vllm']}, {result['dtype']}: {result['verdict']}")
    emit(result, as_json)
    if result["verdict"] != "PASS":
        raise typer.Exit(FAILED)
