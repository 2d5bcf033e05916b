"""An App by its place, "package.module:app", as the command line and the processes of a pool are told it."""

from __future__ import annotations

import importlib
import os
import sys

from millpond.errors import InvalidRequest, NotFound
from millpond.tasks.app import App

APP = "app"  # the name that is looked for where none is given


def load_app(place: str) -> App:
    """Imports the module, with the working directory on the path. What the module raises comes through."""
    module_name, _, name = place.partition(":")
    if not module_name or not all(part.isidentifier() for part in module_name.split(".")):
        raise InvalidRequest(f"{place!r:.200} is no place of an app; write MODULE:APP, such as shop.jobs:app")
    if (here := os.getcwd()) not in sys.path:
        sys.path.insert(0, here)
    try:
        found: object = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not (module_name == error.name or module_name.startswith(f"{error.name}.")):
            raise  # of something that the module itself imports
        raise NotFound(f"there is no module {module_name}; run this where it is, or install it") from None
    for part in (name or APP).split("."):
        if not hasattr(found, part):
            raise NotFound(f"module {module_name} has no {name or APP}; it has {_apps(found)}")
        found = getattr(found, part)
    if not isinstance(found, App):
        raise InvalidRequest(f"{place} is a {type(found).__name__}; name a millpond.App")
    for task in found.tasks.values():
        task.arguments.signature  # noqa: B018 - looks at the annotations: all that they name is defined by now
    return found


def _apps(module: object) -> str:
    """For the error: what could have been meant."""
    return ", ".join(name for name, value in vars(module).items() if isinstance(value, App)) or "no App at all"
