"""`optimum-cli vq ...` is `hf-vq ...`. Optimum imports this file at every start: keep it light."""

from argparse import REMAINDER, ArgumentParser

from optimum.commands.base import BaseOptimumCLICommand, CommandInfo


class VQCommand(BaseOptimumCLICommand):
    """Hands every argument after `vq` to `hf_vq.cli.main`."""

    COMMAND = CommandInfo(name="vq", help="Vector quantization of weights and KV cache (hf_vq).")

    @staticmethod
    def parse_args(parser: ArgumentParser) -> None:
        """Pass all arguments on: without prefix characters `--help` is one of them."""
        parser.prefix_chars = ""
        parser.add_argument("arguments", nargs=REMAINDER)

    def run(self) -> None:
        """Run the command and exit with its status."""
        from hf_vq.cli import main

        raise SystemExit(main(self.args.arguments))


REGISTER_COMMANDS = [VQCommand]
