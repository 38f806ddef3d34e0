"""Generated from protos/oncebox/v1 by `make protos`; do not edit."""
