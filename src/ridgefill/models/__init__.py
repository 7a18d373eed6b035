"""The one seam to the model families: `decoder.py`, and one file per kind of layer."""
