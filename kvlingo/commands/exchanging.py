"""Commands for other programs: export, import, extract."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvlingo.commands.console import emit, stoppable, tell
from kvlingo.commands.options import (
    AsJson,
    Device,
    Dtype,
    Folder,
    Mapper,
    Model,
    Overwrite,
    Source,
    Storage,
    Target,
)


def export_maps(
    folder: Folder,
    out: Annotated[Path, typer.Argument(help="Folder to put the mapper's folder into.", show_default=False)],
    form: Mapper,
    source_revision: Annotated[
        str | None,
        typer.Option(metavar="COMMIT", help="Commit of the source's weights on the hub.", show_default=False),
    ] = None,
    target_revision: Annotated[
        str | None,
        typer.Option(metavar="COMMIT", help="Commit of the target's weights on the hub.", show_default=False),
    ] = None,
    source_model: Annotated[
        str | None, typer.Option(help="The source's hub id, if named otherwise here.", show_default=False)
    ] = None,
    target_model: Annotated[
        str | None, typer.Option(help="The target's hub id, if named otherwise here.", show_default=False)
    ] = None,
    precision: Annotated[str, typer.Option(help="Of the caches it will serve: bf16, fp16 or fp32.")] = "bf16",
    pair: Annotated[
        str | None, typer.Option(help="First words of its id. Default: both models.", show_default=False)
    ] = None,
    bundle: Annotated[int, typer.Option(min=1, help="Raise it when the same weights are fitted anew.")] = 1,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Write a translator of plain linear maps as a mapper folder of semantic-router."""
    with stoppable("nothing was written"):
        from kvlingo import interchange

        naming = interchange.Naming(
            source_model, source_revision, target_model, target_revision, precision, pair, bundle
        )
        result = interchange.export_folder(folder, out, naming, overwrite=overwrite, tell=tell)
        typer.echo(f"wrote {result['folder']}")
    emit(result, as_json)


def import_maps(
    mapper: Annotated[Path, typer.Argument(help="A mapper folder.", show_default=False)],
    out: Annotated[Path, typer.Argument(help="Folder to save the translator to.", show_default=False)],
    form: Mapper,
    source: Source = None,
    target: Target = None,
    dtype: Dtype = None,
    device: Device = None,
    store: Annotated[Storage, typer.Option(help="How to store the weights.")] = Storage.float32,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Save a mapper folder of semantic-router as a translator; loads both models."""
    with stoppable("nothing was written"):
        from kvlingo import interchange
        from kvlingo.jobs import Where

        result = interchange.import_folder(
            mapper,
            out,
            source=source,
            target=target,
            where=Where(device, dtype),
            storage=store.value,
            overwrite=overwrite,
            tell=tell,
        )
        typer.echo(f"saved {out}: {result['num_bytes'] / 1e6:.1f} MB")
    emit(result, as_json)


def extract(
    model: Model,
    out: Annotated[Path, typer.Option(help="Folder to write the extract to.", show_default=False)],
    system: Annotated[
        list[str] | None,
        typer.Option(help="A system prompt that conversations begin with; repeatable.", show_default=False),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(help="What the engine computes in. Default: what the checkpoint is in.", show_default=False),
    ] = None,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Write what vLLM's connector needs of MODEL, so that no worker loads the whole checkpoint again."""
    with stoppable("nothing was written"):
        from kvlingo import extracts

        result = extracts.extract_model(model, out, dtype=dtype, systems=system or [], overwrite=overwrite, tell=tell)
        known = ", ".join(map(str, result["beginnings"])) or "none"
        typer.echo(
            f"wrote {result['folder']}: {result['num_bytes'] / 1e6:.1f} MB in {result['dtype']}, "
            f"beginnings of prompts of {known} tokens"
        )
    emit(result, as_json)
