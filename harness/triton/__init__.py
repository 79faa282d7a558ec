"""Kernels in Triton as subjects: declared, built, loaded and launched, interpreted or compiled."""
