"""The nouns of Ludus; read this package first. Imports nothing, so that numpy-only processes can use ``spec``."""
