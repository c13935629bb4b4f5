"""The `slime` command and what only it uses; nothing else in the package imports this."""

from slime.cli.commands import main as main
from slime.cli.commands import train as train
