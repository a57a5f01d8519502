"""Arguments and options that several commands share, said once."""

from pathlib import Path
from typing import Annotated

import typer

ConfigArgument = Annotated[Path, typer.Argument(metavar="CONFIG", help="The run's YAML file.", show_default=False)]
RunArgument = Annotated[
    str, typer.Argument(metavar="RUN", help="Name of a run, or the path of its directory.", show_default=False)
]
OptionalRunArgument = Annotated[
    str | None,
    typer.Argument(metavar="RUN", help="Name of a run, or the path of its directory.", show_default=False),
]
RunsRootOption = Annotated[
    Path | None,
    typer.Option("--runs-root", metavar="DIR", help="Where runs live [$PAWL_RUNS, else the site file, else ./runs]."),
]
SiteOption = Annotated[
    Path | None,
    typer.Option("--site", metavar="FILE", help="Site file [$PAWL_SITE, else ~/.config/pawl/site.yaml]."),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Replace one value of the config; may be repeated."),
]
JsonFlag = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]
