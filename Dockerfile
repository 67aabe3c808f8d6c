FROM python:3.12-slim
RUN pip install --no-cache-dir "gpumagic[torch,lab]" && useradd --create-home reader
USER reader
WORKDIR /home/reader
EXPOSE 8888
CMD ["jupyter", "lab", "--ip=0.0.0.0"]
