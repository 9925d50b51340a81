"""The core types and interfaces; read this package first."""
