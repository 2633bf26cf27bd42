"""Write every vector file, in place."""

from pathlib import Path

from .all import files

if __name__ == "__main__":
    for name, text in files().items():
        (Path(__file__).parents[2] / "vectors" / name).write_text(text, encoding="utf-8")
        print(name)
