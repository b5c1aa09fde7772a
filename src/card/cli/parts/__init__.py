"""The parts of commands: options, help, tables, files, models. Commands of folders beside the core use them, too.

It lies below the commands of the core: no module here imports one that lies beside this folder.
"""
