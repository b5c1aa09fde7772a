# docker build -t card . && docker run --rm -p 127.0.0.1:8000:8000 card
FROM python:3.13-slim AS build
COPY . /src
RUN pip wheel --no-cache-dir -c /src/constraints.txt -w /wheels "/src[serve]"

FROM python:3.13-slim
RUN --mount=from=build,source=/wheels,target=/wheels pip install --no-cache-dir --no-index -f /wheels "card-decoding[serve]" \
    && useradd --create-home card
USER card
WORKDIR /home/card
EXPOSE 8000
HEALTHCHECK --start-period=60s CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health')"]
ENTRYPOINT ["card", "serve", "--host", "0.0.0.0"]
CMD ["--target", "demo-target", "--draft", "demo-draft"]
