"""The script `hf-vq`: help, version and wrong arguments need neither torch nor Transformers."""

import sys
from importlib.util import find_spec, module_from_spec


def main():
    """Run `hf_vq.cli.main`; the package itself is imported once a verb is known."""
    if "hf_vq" in sys.modules:
        from hf_vq.cli import main as run

        return run()
    spec = find_spec("hf_vq")
    package = sys.modules["hf_vq"] = module_from_spec(spec)  # its folder, but nothing in it has run
    from hf_vq.cli import main as run

    return run(before=lambda: spec.loader.exec_module(package))
