"""Writing of recorded calls to files: conversion to records, periodic writing, limits, and the flight recorder."""
