"""The catalogue of planted faults: small modules with one fault each, and right modules in many styles.

A file of this package is one family with two tables, FAULTS and CONTROLS. The tables may grow; nothing is removed.
"""
