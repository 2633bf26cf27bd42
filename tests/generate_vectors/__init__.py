"""Write the vector files from the references: ``python -m tests.generate_vectors``. A module per file or idea."""
