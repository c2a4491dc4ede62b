"""What the inside of a container looks like to its commands: where they start, and the variables they have."""

from __future__ import annotations

import posixpath
from collections.abc import Mapping

from sandboxes import shell
from sandboxes.container_shell import ContainerShell
from sandboxes.environment import DEFAULT_PATH, NAME
from sandboxes.shell_sandbox import Inside

WORKSPACE = "/workspace"  # the first folder where neither sample, user nor image names one
TMP = "/tmp"  # noqa: S108 (the container's own)

# In front of a process where the engine leaves more to do than docker does: what was said on stderr on the way is cut
# off from what follows, and the process leads a session, by which it is found and ended. Argument 0 is a folder for
# HOME where the image has none that can be written to.
DOORSTEP = r"""printf '\000' >&2
{ mkdir -p "$HOME" && [ -w "$HOME/" ]; } 2>/dev/null || HOME=$0
export HOME
read -r _ _ _ _ group _ <"/proc/$$/stat"
[ "$group" = $$ ] || ! command -v setsid >/dev/null || exec setsid "$@"
exec "$@"
"""


def first_folders(of_sample: str, of_user: str, of_image: str) -> list[str]:
    """Return shell words for the folders where commands may start, the best first."""
    usual = [path for path in (of_user, of_image) if path not in ("", "/")] or [WORKSPACE]
    if of_sample == "~" or of_sample.startswith("~/"):
        return [f'"$HOME"{shell.quote(of_sample[1:])}']
    if of_sample:
        return [shell.quote(posixpath.join(usual[0], of_sample))]
    return [*map(shell.quote, [*usual, WORKSPACE]), '"$HOME"', TMP, "/"]


def inside(opened: ContainerShell, of_image: Mapping[str, str], of_user: Mapping[str, str]) -> Inside:
    """Return what a container's shell found, with the image's variables and those that are wished for over them."""
    known = {name: value for name, value in of_image.items() if NAME.fullmatch(name)}
    variables = {"PATH": DEFAULT_PATH, "TMPDIR": TMP, **known, "HOME": opened.home, **of_user}
    return Inside(variables, opened.folder)
